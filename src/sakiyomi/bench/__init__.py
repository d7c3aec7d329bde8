"""The benchmark: drafters beside each other, and beside other engines, on prompts of several kinds."""
