"""The models that octavo prepares; GGUF files made into Hugging Face directories."""
