"""Arithmetic of speculation, without a model: what a draft is worth, and what it may cost."""
