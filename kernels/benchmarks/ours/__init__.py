"""Our own operators, called as an engine would call them."""
