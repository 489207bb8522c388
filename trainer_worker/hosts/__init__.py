"""One trainer on several hosts: process 0 leads and serves, the others execute what it executes."""
