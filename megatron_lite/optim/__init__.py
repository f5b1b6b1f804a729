"""From summed gradients to new weights: unscale, agree on overflow, clip, AdamW on masters, learning rate."""
