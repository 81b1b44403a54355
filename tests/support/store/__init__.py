"""What tests of the disk tier share: records, damage, and engines with a store to look into."""
