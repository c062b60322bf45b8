"""One file per export format. See base.py for what a format must say."""
