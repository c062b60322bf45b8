"""What `plan` is made of: what an engine is asked, lengths of prompts, what was measured, advice, and the page."""
