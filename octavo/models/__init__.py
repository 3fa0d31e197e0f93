"""The models that octavo prepares: what is there, and GGUF files made into Hugging Face directories."""
