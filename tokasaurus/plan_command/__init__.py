"""`toka plan`: how a model's memory would be divided on a device, without the device and without its weights."""
