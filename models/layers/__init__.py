"""Building blocks that know their tensor-parallel shard."""
