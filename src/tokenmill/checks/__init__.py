"""What doctor looks at, a file per concern. A check reads and tells; it changes nothing and loads no model."""
