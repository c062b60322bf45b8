"""One file per inference engine: pure methods, no I/O. See base.py for what an engine must say."""
