"""Operators: the protocol that users implement, and the built-in operators."""
