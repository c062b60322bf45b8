"""What `tune` is made of: a closed loop on one server, what is kept of it, the page."""
