"""sakiyomi: speculative decoding as a product."""
