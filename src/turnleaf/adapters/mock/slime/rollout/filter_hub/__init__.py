"""`slime.rollout.filter_hub`: which groups are worth training on."""
