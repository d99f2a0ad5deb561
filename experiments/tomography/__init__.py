"""Tomography: ray transforms, filtered back-projection, phantoms, noise, and the choice of the next angles."""
