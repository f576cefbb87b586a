"""A long run under faults whose results are compared with an independent batch computation."""
