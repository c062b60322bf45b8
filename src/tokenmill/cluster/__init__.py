"""Where nodes run: in this process (local.py), or one per machine of a cluster. The seam is in base.py."""
