"""Error bars for images from tomography: an untrained network as a prior over images, made linear at its solution."""
