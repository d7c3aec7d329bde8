"""Training drafters: text of the target's own, its hidden states, the fit, and what the decoding loop makes of it."""
