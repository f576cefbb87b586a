"""Where results go. A repeated batch replaces what it wrote before; it never adds."""
