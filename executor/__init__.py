"""Turns one planned step into token ids, on the device."""
