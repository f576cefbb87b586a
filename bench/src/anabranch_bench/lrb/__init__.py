"""Linear Road, measured: ``anabranch bench lrb``."""
