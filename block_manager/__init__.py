"""Who may use which KV block; plain Python, no torch."""
