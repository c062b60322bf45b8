"""What `stage` is made of: where to, the way there, what servers load, and a download that is still coming."""
