"""`slime.rollout`: how slime has rollouts generated, scored, filtered and put back."""
