"""Figures as ratios in one run: python -m bench. Nothing is timed in tests; here nothing is asserted."""
