"""What `inspect` is made of: rows of any shape, what one row shows, all of them added up, the verdict, the page."""
