"""A real-gradient A/B: arms off, on, off again, judged by rules that were written down before."""
