"""What installs slime's environment: install_slime.sh, and what it asks about its steps."""
