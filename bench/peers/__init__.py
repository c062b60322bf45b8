"""Other clients that do the same step, side by side with tokenmill; setup.sh makes their environments."""
