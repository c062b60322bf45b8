"""Are token ids, text and counts of an answer one? At a server's canary, at some rows, in an audit; ids from text."""
