"""One file a backend; each optional kernel library is imported in one of them only."""
