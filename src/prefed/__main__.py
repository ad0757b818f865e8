from prefed.cli import main

main()
