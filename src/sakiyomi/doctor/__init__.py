"""Whether a trained drafter is sound and fits its target, before anything is served with it."""
