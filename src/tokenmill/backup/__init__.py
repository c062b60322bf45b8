"""A copy of a run that outlives its machine: what lies there, a round of it, when rounds are made, the way back."""
