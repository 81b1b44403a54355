"""What a chat does when it is interrupted, ended or stopped for a while."""
