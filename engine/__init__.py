"""What runs next, and the life of a request."""
