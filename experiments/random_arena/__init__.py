"""An arena whose cells are drawn at random, so that no policy was designed for them."""
