"""Text from tokens and tokens from text."""
