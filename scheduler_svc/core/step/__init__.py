"""A step: who enters, who decodes, who is prefilled, who makes room, and what came back."""
