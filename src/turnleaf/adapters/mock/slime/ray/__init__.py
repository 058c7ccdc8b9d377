"""`slime.ray`: what becomes of the rollouts, without Ray."""
