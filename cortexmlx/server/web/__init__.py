"""What any web application needs: who may ask, bodies and streams, the log, and the address."""
