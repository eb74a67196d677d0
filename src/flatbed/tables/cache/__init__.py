"""Records of frequent rows on the computing device, in front of a storage. A cache never changes a result."""
