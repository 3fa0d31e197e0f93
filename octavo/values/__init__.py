"""What callers give and get: parameters, prompts, outputs, and how they are said in words."""
