"""Reads and writes paged K/V on the device."""
