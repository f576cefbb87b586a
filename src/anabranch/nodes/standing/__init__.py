"""Standing nodes: they form a ring, and keep fragments for many queries."""
