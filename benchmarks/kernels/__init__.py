"""The CPU kernels against torch: attention, prefix groups and gemms."""
