"""Fast, exact fine-tuning of the action experts of vision-language-action policies."""
