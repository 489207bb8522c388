"""What travels between the two sides: tensor codec, digests, payload planes, channels, errors."""
