"""What producers and workers share: schemas, errors and the seam to Redis."""
