"""What encoding costs, and the fuzz that compares it with plain Hugging Face `tokenizers`."""
