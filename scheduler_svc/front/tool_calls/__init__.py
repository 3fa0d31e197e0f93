"""Tool calls and reasoning in the text of chat outputs."""
