"""The ways in: the LLM class, the command line, the OpenAI-compatible server."""
